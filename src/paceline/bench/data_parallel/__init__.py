"""`paceline bench data-parallel`: dp and fsdp against their peers."""
