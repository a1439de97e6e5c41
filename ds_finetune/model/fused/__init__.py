"""RMSNorm, rotary embedding and SwiGLU, each as one fused kernel."""
