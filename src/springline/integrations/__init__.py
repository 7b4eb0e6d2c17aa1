"""Callbacks for training frameworks that own the loop, one file per framework."""
