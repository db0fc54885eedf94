"""The fused attention inside other libraries' models; each module needs the library it is for."""
