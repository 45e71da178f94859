"""Gradients that are reduced together: as they are, or through a codec."""

from .plain import Bucket, Sink

__all__ = ["Bucket", "Sink"]
