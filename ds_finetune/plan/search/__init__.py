"""Plans a run for given machines without importing torch: legal layouts, and layouts whose memory fits."""
