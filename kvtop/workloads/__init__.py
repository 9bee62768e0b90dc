"""Where requests come from: trace files (``trace``) and synthetic workloads (``catalog``)."""
