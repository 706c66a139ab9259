"""Prometheus, Grafana and the runbooks of the stack."""
