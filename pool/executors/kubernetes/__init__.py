"""The executor of Kubernetes clusters whose GPUs are offered by the NVIDIA GPU Operator (or by HAMi, or by DRA)."""
