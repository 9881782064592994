"""Cohort's web application: rows, services, REST and pages. Imports only the torch-free files of the engine."""
