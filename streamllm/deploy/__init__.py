"""Many engines behind one address: which replica serves a request, and how replicas run on Ray Serve."""
