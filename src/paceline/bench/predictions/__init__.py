"""`paceline bench predictions`: published training runs, predicted beside measured."""
