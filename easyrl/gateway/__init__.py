"""The recording gateway: a process between environments' clients and the trainer's process."""
