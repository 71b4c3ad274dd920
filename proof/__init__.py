"""The long claims, each measured by a program that drives the product by its command line; `make proof` runs them."""
