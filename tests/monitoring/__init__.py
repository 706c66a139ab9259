"""The whole of the monitoring, live: a real Prometheus and real exporters over a stack of processes."""
