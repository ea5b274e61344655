"""The refusals of strict providers, in the providers' own words. Pure."""
