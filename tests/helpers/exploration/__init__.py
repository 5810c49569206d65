"""A model checker for Shoal's own code: every order of the steps of a few ranks, up to a bound."""
