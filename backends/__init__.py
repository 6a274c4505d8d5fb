"""Where sandboxes run. One module per engine, each the only importer of its SDK."""
