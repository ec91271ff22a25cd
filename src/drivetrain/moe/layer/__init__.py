"""The mixture layer: router, experts, dispatch and load balancing."""
