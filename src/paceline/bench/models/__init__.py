"""`paceline bench models`: many models on many meshes, each compared with its serial module."""
