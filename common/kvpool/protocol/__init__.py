"""Rules beyond the protos that both ends of a call share: limits, sampling parameters, statuses. No I/O, no grpc."""
