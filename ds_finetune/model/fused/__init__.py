"""Fused kernels of RMSNorm, rotary embedding and SwiGLU."""
