"""The peer copy: what a keeper holds in memory is copied to the keeper of another node, and fetched from there."""
