"""A center behind remote calls: a head knows the members, shards hold the bytes."""
