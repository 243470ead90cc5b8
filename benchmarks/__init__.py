"""Speed, as ratios of medians that are measured interleaved, beside the peers on the same work."""
