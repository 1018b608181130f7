"""What both ends of a call agree on beyond the protos: limits, sampling parameters, statuses. No I/O, no grpc."""
