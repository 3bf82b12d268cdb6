"""The synchronizer: merges fragments and serves them over gRPC."""
