"""The rows that efficiencies are fitted on, and the fit."""
