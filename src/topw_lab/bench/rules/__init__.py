"""`topw bench rules`: time the decoding loop of each model under every sampling rule and temperature."""
