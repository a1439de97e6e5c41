"""The layouts of this program held against a plain loop with tiny models, on the machines and versions at hand."""
