"""A center that is served: a head knows the members, shards hold the bytes, wherever they are."""
