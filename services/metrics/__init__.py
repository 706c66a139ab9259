"""What Prometheus scrapes from us: the state of all runs and queues, and what each worker's process does and holds."""
