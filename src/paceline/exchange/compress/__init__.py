"""Gradients made smaller before they cross a link, with what that leaves out kept for the next one.

A `Codec` turns a tensor into a few smaller ones and back (`codec.py`; `names.py` has them all), a `Compression` adds
error feedback for the tables of a job (`feedback.py`), and `choose.py` weighs a codec's time against the link's. What
is decoded is the same bits on every machine: each replica of a shard decodes for itself. Codecs know nothing of
servers, and serve any exchange.
"""
