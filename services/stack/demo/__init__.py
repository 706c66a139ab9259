"""The whole way on one machine without a GPU: a small real target, real prompts, a real server and queue."""
