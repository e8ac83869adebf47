"""The rules of PyTorch's CUDA caching allocator."""
