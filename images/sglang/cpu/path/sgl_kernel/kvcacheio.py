"""Stands in for sgl_kernel.kvcacheio: every name imports, none can be called."""

from sgl_kernel._absent import absent_kernels

__getattr__ = absent_kernels(__name__)
