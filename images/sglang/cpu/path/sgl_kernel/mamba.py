"""Stands in for sgl_kernel.mamba: every name imports, none can be called."""

from sgl_kernel._absent import absent_kernels

__getattr__ = absent_kernels(__name__)
