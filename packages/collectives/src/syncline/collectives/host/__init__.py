"""Groups made of blocking transports on host memory."""
