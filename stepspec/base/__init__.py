"""What every layer uses: files, extras, threads, readers of JSON and of settings."""
