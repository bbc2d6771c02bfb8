"""Tables without native code: slower, with the same bits. For machines that have no compiler, and for tests."""
