"""Other systems and Meshwright, side by side: one small file for each, and what makes them take turns."""
