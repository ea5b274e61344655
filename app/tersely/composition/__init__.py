"""The composition root: the service is built here from the settings, and nowhere else."""
