"""What each expert knows: profiles, the knowledge graph and its files."""
