"""Training objectives: losses that are sums of means over tokens, pairs or examples of the global batch."""
