"""A module that ranks may share."""
