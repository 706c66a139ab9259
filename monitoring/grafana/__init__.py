"""The dashboards, as Python writes them; Grafana loads what is in dashboards/."""
