"""The version of the distribution `sglang-lossless`."""

__version__ = "0.1.0"
