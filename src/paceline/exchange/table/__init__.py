"""Parameters in memory, with what their update rule keeps beside them: the part of a server that computes.

`Dense` is a range of elements, `Sparse` rows by 64-bit keys. Both are functions of what was done to them, in order: the
same calls give the same bits, in native code and in numpy (`portable/`), on every machine. So formulas are written in
operations that IEEE 754 rounds in one way only, in a fixed order; there are no logarithms of a C library and no fused
multiply-adds. The room knows nothing of shards, workers and messages. One thread at a time calls a table; native code
lets others run meanwhile.
"""
