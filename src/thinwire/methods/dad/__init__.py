"""Distributed auto-differentiation: factors instead of gradients."""

from thinwire.methods.dad.dad import DAD as DAD
