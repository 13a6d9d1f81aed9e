"""The backend over nixl and UCX: one-sided writes by RDMA, CUDA IPC, shared memory or TCP."""
