// TensorRT's library of its own plugins: the Python module requires it, but nothing here uses it.
extern "C" bool initLibNvInferPlugins(void*, const char*) { return true; }
