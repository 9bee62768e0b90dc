"""What is shipped for Prometheus, Alertmanager and Grafana, generated from the tables in ``alerts`` and ``panels``."""
