"""The method inside other trainers: one module each, which imports that trainer."""
