"""Encoders as static graphs: one interface, and what implements it for each family of models."""
