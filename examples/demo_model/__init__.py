"""Training program of the bundled demo model and its two drafters."""
