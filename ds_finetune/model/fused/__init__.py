"""RMSNorm, rotary embedding and SwiGLU as one kernel each."""
